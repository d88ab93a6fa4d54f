-- Tenths of a millisecond since 1970: what the caller gave, or the server's clock when it gave ""; and the part of one
-- since then.
local function clock(given)
  if given ~= "" then
    return tonumber(given), 0
  end
  local time = redis.call("TIME")
  return time[1] * 10000 + math.floor(time[2] / 100), time[2] % 100 / 100
end
