-- Return the time in whole tenths of a millisecond since 1970, and the part of a tenth that has passed since. A test
-- gives the time; with "" it comes from the server's clock.
local function clock(given)
  if given ~= "" then
    return tonumber(given), 0
  end
  local time = redis.call("TIME")
  return time[1] * 10000 + math.floor(time[2] / 100), time[2] % 100 / 100
end
