-- Delete the keys of the given queues, of those in the index, and of all queues together: somebody has written into them.
-- Redis is loaded again then. Nothing is deleted when Redis holds the ids of another database. "seen" is when the caller
-- met what is not ours (tenths).
-- Returns "ok"; or "wait" when all was deleted shortly before that.
local meta, queues, wake_all, blocked_counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now, seen, identity, names = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], 4
-- @include owner
-- In tenths of a ms: the time between two deletions.
local INTERVAL = 300000
if redis.call("TYPE", meta).ok == "hash" then
  if is_foreign(meta, identity) then
    return FOREIGN
  end
  local cleared = tonumber(redis.call("HGET", meta, "cleared") or "")
  if cleared and cleared >= seen and cleared <= now then
    return "ok"
  elseif cleared and cleared <= now and now < cleared + INTERVAL then
    return "wait"
  end
end
local function base_of(name)
  return string.sub(queues, 1, -7) .. name
end
local function delete_queue(name)
  local base = base_of(name)
  redis.call("UNLINK", base .. ":delayed", base .. ":ready", base .. ":wake", base .. ":aside")
end
for i = names, #ARGV do
  delete_queue(ARGV[i])
end
if redis.call("TYPE", queues).ok == "zset" then
  for _, name in ipairs(redis.call("ZRANGE", queues, 0, -1)) do
    delete_queue(name)
  end
end
if redis.call("TYPE", blocked_counts).ok == "hash" then
  for _, field in ipairs(redis.call("HKEYS", blocked_counts)) do
    local queue, name = string.match(field, "^([^:]*):(.*)$")
    if queue then
      delete_queue(queue)
      redis.call("UNLINK", base_of(queue) .. ":aside:" .. name)
    end
  end
end
redis.call("UNLINK", meta, queues, wake_all, blocked_counts)
redis.call("HSET", meta, "cleared", string.format("%.0f", now))
return "ok"
