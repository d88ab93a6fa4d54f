-- Count one more tick, and return the meta. If a process gets a tick that is not greater than its last one, Redis went
-- back to an old snapshot. Nothing is written when Redis holds the ids of another database.
-- Returns tick, horizon, loaded, run_id, replid, identity, loader_until, requested.
local meta = KEYS[1]
local identity = ARGV[1]
-- @include owner
local found = redis.call("HMGET", meta, "tick", "horizon", "loaded", "run_id", "replid", "identity", "loader_until", "requested")
if not is_another(found[6], identity) then
  found[1] = tostring(redis.call("HINCRBY", meta, "tick", 1))
end
return found
