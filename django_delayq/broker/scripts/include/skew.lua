-- Change the skew in the meta as far as a measurement proves: it lies between two numbers of tenths. With "" nothing was
-- measured. A measurement that agrees changes nothing, so the skew does not jitter.
local function adjust_skew(least, most)
  if least ~= "" then
    local skew = tonumber(redis.call("HGET", meta, "skew") or "") or 0
    local proven = math.max(tonumber(least), math.min(tonumber(most), skew))
    if proven ~= skew then
      redis.call("HSET", meta, "skew", string.format("%.0f", proven))
    end
  end
end
