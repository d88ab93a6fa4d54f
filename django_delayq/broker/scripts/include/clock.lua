-- Milliseconds since 1970: what the caller gave, or the server's clock when it gave "".
local function clock(given)
  if given ~= "" then
    return tonumber(given)
  end
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
