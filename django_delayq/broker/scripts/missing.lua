-- Find messages that Redis lacks, or holds at a later time than their due time. Moves none of them. Redis may have lost the
-- index of queues alone, so a missing entry for this queue is written again.
-- Entries: id, due tenth, rank, id, due tenth, rank, …
-- Returns their ids.
local delayed, ready, wake, queues, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local blocked, blocked_counts = KEYS[6], KEYS[7]
local queue, entries = ARGV[1], 2
-- @include scores
-- @include notify
-- @include index
-- @include blocked
local missing, any_blocked = {}, redis.call("EXISTS", blocked) == 1
for i = entries, #ARGV, 3 do
  local id = ARGV[i]
  if not redis.call("ZSCORE", ready, id) and not (any_blocked and is_blocked(blocked, blocked_counts, queue, id)) then
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
