-- Put ids aside that were taken, under the name of the reason. With "h" it begins when another worker may have the handler
-- that is missing here, or room for it: wake one. A limit that is full is full for all.
-- Entries: name, how many, then score in ready, id, score, id, …; name, how many, …
-- Returns "ok".
local aside, asides, wake, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local queue, entries = ARGV[1], 2
-- @include aside
-- @include notify
local wanted, at = false, entries
while ARGV[at] do
  local name, first, last = ARGV[at], at + 2, at + 1 + 2 * tonumber(ARGV[at + 1])
  local ids, named = {}, {}
  for i = first, last, 2 do
    ids[#ids + 1] = ARGV[i + 1]
    named[#named + 1], named[#named + 2] = ARGV[i + 1], name
  end
  for i, other in ipairs(redis.call("HMGET", aside, unpack(ids))) do
    if other then
      leave_aside(aside, asides, queue, ids[i])
    end
  end
  redis.call("ZADD", siding(aside, name), unpack(ARGV, first, last))
  redis.call("HSET", aside, unpack(named))
  count_aside(aside, asides, queue, name)
  wanted = wanted or string.sub(name, 1, 2) == "h "
  at = last + 1
end
if wanted then
  notify(wake)
  notify(wake_all)
end
return "ok"
