-- Return the time by the record's clock, in whole tenths of a millisecond since 1970, and the part of a tenth that has
-- passed since. That is the server's clock and, in the meta, how far the record's clock is ahead of it ("skew", tenths;
-- negative: behind). A test gives the server's time; with "" it is read.
local function clock(given)
  local tenths, part = tonumber(given), 0
  if given == "" then
    local time = redis.call("TIME")
    tenths, part = time[1] * 10000 + math.floor(time[2] / 100), time[2] % 100 / 100
  end
  local skew = redis.call("HGET", meta, "skew")
  if not skew or #skew > 16 or not string.find(skew, "^%-?%d+$") then
    skew = 0
  end
  return tenths + skew, part
end
