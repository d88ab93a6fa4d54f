-- Count one more tick of a queue, and return its meta. If a process gets a tick that is not greater than its last one,
-- Redis went back to an old snapshot. Keys of another type than ours are deleted: every script would stumble over them.
-- Nothing is written when the queue belongs to another database.
-- Between least_skew and most_skew (tenths, or "") lies how far the record's clock is ahead of the server's.
-- Returns now, tick, horizon, loaded, run_id, replid, identity, skew ("" for what is missing).
local delayed, ready, meta, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now, identity, least_skew, most_skew = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include clock
-- @include owner
-- @include skew
local function is_wrong(found, kind)
  return found.ok ~= "none" and found.ok ~= kind
end

local tick = 0
if is_wrong(redis.call("TYPE", meta), "hash") then
  redis.call("DEL", meta)
end
if not is_foreign(meta, identity) then
  -- Without "loaded" the queue is loaded from the beginning.
  if is_wrong(redis.call("TYPE", delayed), "zset") then
    redis.call("DEL", delayed)
    redis.call("HDEL", meta, "loaded")
  end
  if is_wrong(redis.call("TYPE", ready), "zset") then
    redis.call("DEL", ready)
    redis.call("HDEL", meta, "loaded")
  end
  if is_wrong(redis.call("TYPE", wake), "list") then
    redis.call("DEL", wake)
  end
  adjust_skew(least_skew, most_skew)
  tick = redis.pcall("HINCRBY", meta, "tick", 1)
  if type(tick) == "table" and (string.find(tick.err, "not an integer") or string.find(tick.err, "overflow")) then
    redis.call("HDEL", meta, "tick")
    tick = redis.call("HINCRBY", meta, "tick", 1)
  elseif type(tick) == "table" then
    return tick
  end
end
local answer = {string.format("%.0f", clock(now)), tick}
for i, field in ipairs({"horizon", "loaded", "run_id", "replid", "identity", "skew"}) do
  answer[2 + i] = redis.call("HGET", meta, field) or ""
end
return answer
