-- Count one more tick of a queue, and return its meta. If a process gets a tick that is not greater than its last one,
-- Redis went back to an old snapshot.
-- Returns now, tick, horizon, loaded, run_id, replid, identity ("" for what is missing).
local meta = KEYS[1]
local now = ARGV[1]
-- @include clock
local tick = redis.call("HINCRBY", meta, "tick", 1)
local answer = {string.format("%.0f", clock(now)), tick}
for i, field in ipairs({"horizon", "loaded", "run_id", "replid", "identity"}) do
  answer[2 + i] = redis.call("HGET", meta, field) or ""
end
return answer
