-- Block ids that were taken, under the name of the reason. A name that begins with "h" means that the handler is missing or
-- has no free slot in the worker that took the ids. Another worker may have it: wake one. A full limit is full for all.
-- Entries: name, how many, then score in ready, id, score, id, …; name, how many, …
-- Returns "ok".
local blocked, blocked_counts, wake, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local queue, entries = ARGV[1], 2
-- @include blocked
-- @include notify
local wakes, at = false, entries
while ARGV[at] do
  local name, first, last = ARGV[at], at + 2, at + 1 + 2 * tonumber(ARGV[at + 1])
  local ids, named = {}, {}
  for i = first, last, 2 do
    ids[#ids + 1] = ARGV[i + 1]
    named[#named + 1], named[#named + 2] = ARGV[i + 1], name
  end
  for i, other in ipairs(redis.call("HMGET", blocked, unpack(ids))) do
    if other then
      unblock(blocked, blocked_counts, queue, ids[i])
    end
  end
  redis.call("ZADD", blocked_under(blocked, name), unpack(ARGV, first, last))
  redis.call("HSET", blocked, unpack(named))
  count_blocked(blocked, blocked_counts, queue, name)
  wakes = wakes or string.sub(name, 1, 2) == "h "
  at = last + 1
end
if wakes then
  notify(wake)
  notify(wake_all)
end
return "ok"
