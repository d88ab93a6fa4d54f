-- Record how far the loader has come (upto "": no further). With lease "" it has finished, and another loader may begin.
-- When another load was requested meanwhile, Redis does not count as loaded.
-- Returns "ok", or "lost" when this worker is no longer the loader: Redis was lost meanwhile, or the worker was slow.
local meta = KEYS[1]
local now, worker, upto, lease = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
if redis.call("HGET", meta, "loader") ~= worker then
  return "lost"
end
if upto ~= "" and redis.call("HEXISTS", meta, "requested") == 0 then
  redis.call("HSET", meta, "loaded", upto)
end
if lease == "" then
  redis.call("HDEL", meta, "loader", "loader_until")
else
  redis.call("HSET", meta, "loader_until", string.format("%.0f", now + tonumber(lease)))
end
return "ok"
