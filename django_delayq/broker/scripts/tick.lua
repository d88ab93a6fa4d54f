-- Count one more tick, and return the meta. If a process gets a tick that is not greater than its last one, Redis went
-- back to an old snapshot. Keys of another type than ours are deleted: every script would stumble over them.
-- Nothing is written when Redis holds the ids of another database.
-- Returns tick, horizon, loaded, run_id, replid, identity, loader_until ("" for what is missing).
local meta, queues, wake_all = KEYS[1], KEYS[2], KEYS[3]
local identity = ARGV[1]
-- @include owner
-- @include types
local tick = 0
drop_wrong(meta, "hash")
if not is_foreign(meta, identity) then
  if drop_wrong(queues, "zset") then
    -- A load from the beginning writes the index again.
    redis.call("HDEL", meta, "loaded")
  end
  drop_wrong(wake_all, "list")
  tick = redis.pcall("HINCRBY", meta, "tick", 1)
  if type(tick) == "table" and (string.find(tick.err, "not an integer") or string.find(tick.err, "overflow")) then
    redis.call("HDEL", meta, "tick")
    tick = redis.call("HINCRBY", meta, "tick", 1)
  elseif type(tick) == "table" then
    return tick
  end
end
local answer = {tick}
local fields = redis.call("HMGET", meta, "horizon", "loaded", "run_id", "replid", "identity", "loader_until")
for i, value in ipairs(fields) do
  answer[1 + i] = value or ""
end
return answer
