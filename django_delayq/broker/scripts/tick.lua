-- Count one more tick of a queue, and return its meta. If a process gets a tick that is not greater than its last one,
-- Redis went back to an old snapshot.
-- Between least_skew and most_skew (tenths, or "") lies how far the record's clock is ahead of the server's.
-- Returns now, tick, horizon, loaded, run_id, replid, identity, skew ("" for what is missing).
local meta = KEYS[1]
local now, least_skew, most_skew = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include skew
adjust_skew(least_skew, most_skew)
local tick = redis.call("HINCRBY", meta, "tick", 1)
local answer = {string.format("%.0f", clock(now)), tick}
for i, field in ipairs({"horizon", "loaded", "run_id", "replid", "identity", "skew"}) do
  answer[2 + i] = redis.call("HGET", meta, field) or ""
end
return answer
