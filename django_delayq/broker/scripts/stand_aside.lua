-- Put ids aside that were taken, under the name of the reason. Another worker may have the handler that is missing here,
-- or room for it: wake one. A limit that is full is full for all.
-- Entries: id, score in ready, name, id, …
-- Returns "ok".
local aside, asides, wake, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local queue, entries = ARGV[1], 2
-- @include aside
-- @include notify
local names, wanted = {}, false
for i = entries, #ARGV, 3 do
  local id, name = ARGV[i], ARGV[i + 2]
  leave_aside(aside, asides, queue, id)
  redis.call("ZADD", siding(aside, name), ARGV[i + 1], id)
  redis.call("HSET", aside, id, name)
  names[name] = true
  wanted = wanted or string.sub(name, 1, 8) == "handler "
end
for name in pairs(names) do
  count_aside(aside, asides, queue, name)
end
if wanted then
  notify(wake)
  notify(wake_all)
end
return "ok"
