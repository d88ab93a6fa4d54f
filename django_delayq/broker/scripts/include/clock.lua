-- Milliseconds since 1970: what the caller gave, or the server's clock when it gave ""; and the part of one since then.
local function clock(given)
  if given ~= "" then
    return tonumber(given), 0
  end
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000), time[2] % 1000 / 1000
end
