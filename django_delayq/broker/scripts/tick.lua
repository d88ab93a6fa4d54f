-- Count one more tick, and return the meta. If a process gets a tick that is not greater than its last one, Redis went
-- back to an old snapshot. Nothing is written when Redis holds the ids of another database.
-- Returns tick, horizon, loaded, run_id, replid, identity, loader_until, requested.
local meta = KEYS[1]
local identity = ARGV[1]
local found = redis.call("HMGET", meta, "tick", "horizon", "loaded", "run_id", "replid", "identity", "loader_until", "requested")
local owner = found[6]
if identity == "" or not owner or owner == identity then
  found[1] = tostring(redis.call("HINCRBY", meta, "tick", 1))
end
return found
