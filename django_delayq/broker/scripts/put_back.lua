-- Put taken ids back into delayed or ready, at the scores that the caller gives.
-- Entries: id, score in delayed or "", score in ready or "", id, …
-- Returns "ok".
local delayed, ready, wake, queues, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local queue, entries = ARGV[1], 2
-- @include notify
-- @include index
local first = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")
local earliest, wanted = tonumber(first[2] or ""), false
for i = entries, #ARGV, 3 do
  local score = tonumber(ARGV[i + 1])
  if score then
    redis.call("ZADD", delayed, ARGV[i + 1], ARGV[i])
    if earliest == nil or score < earliest then
      earliest, wanted = score, true
    end
  else
    redis.call("ZADD", ready, ARGV[i + 2], ARGV[i])
    wanted = true
  end
end
note(queues, queue, needed_at(delayed, ready))
if wanted then
  notify(wake)
  notify(wake_all)
end
return "ok"
