-- Find messages that have no place, or a place later than their due time. Changes none of these places. The index of
-- queues may have been lost without them, so what it says of this queue is written again.
-- Entries: id, due tenth, rank, id, due tenth, rank, …
-- Returns their ids.
local delayed, ready, wake, queues, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local aside, asides = KEYS[6], KEYS[7]
local queue, entries = ARGV[1], 2
-- @include places
-- @include notify
-- @include index
-- @include aside
local missing, any_aside = {}, redis.call("EXISTS", aside) == 1
for i = entries, #ARGV, 3 do
  local id = ARGV[i]
  if not redis.call("ZSCORE", ready, id) and not (any_aside and stands_aside(aside, asides, queue, id)) then
    local score = redis.call("ZSCORE", delayed, id)
    if not score or tonumber(score) > delayed_score(tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])) then
      missing[#missing + 1] = id
    end
  end
end
if not redis.call("ZSCORE", queues, queue) then
  note(queues, queue, needed_at(delayed, ready))
  if redis.call("ZSCORE", queues, queue) then
    notify(wake)
    notify(wake_all)
  end
end
return missing
