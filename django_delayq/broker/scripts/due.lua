-- Find the queues that have ids which are ready, or fall due within the next tenths ("within"): the given ones of the
-- index, or all of it when none is given. Changes nothing. Queues come by name, in a circle from the one after "after".
-- The keys of a queue are built from its name: all keys of a deployment share one hash tag.
-- Returns the due tenth of the next other queue ("" when there is none) and how many more queues there are, then queue,
-- number ready, number due, queue, … The numbers end with the queue at which they reach "enough".
local meta, queues = KEYS[1], KEYS[2]
local now, within, enough, after, names = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], 5
local upto = now + within
local found, next_at = {}, nil
if #ARGV >= names then
  for i = names, #ARGV do
    local at = tonumber(redis.call("ZSCORE", queues, ARGV[i]) or "")
    if at and at <= upto then
      found[#found + 1] = ARGV[i]
    elseif at and (next_at == nil or at < next_at) then
      next_at = at
    end
  end
else
  local first = redis.call("ZRANGE", queues, 0, 0, "WITHSCORES")
  next_at = tonumber(first[2] or "")
  if next_at and next_at <= upto then
    found = redis.call("ZRANGEBYSCORE", queues, "-inf", string.format("%.0f", upto))
    local later = redis.call("ZRANGE", queues, #found, #found, "WITHSCORES")
    next_at = tonumber(later[2] or "")
  end
  table.sort(found, function(one, other)
    if (one > after) ~= (other > after) then
      return one > after
    end
    return one < other
  end)
end
local answer = {next_at and string.format("%.0f", next_at) or "", #found}
local number = 0
for _, queue in ipairs(found) do
  if number >= enough then
    break
  end
  local base = string.sub(queues, 1, -7) .. queue
  local ready = redis.call("ZCARD", base .. ":ready")
  local due = redis.call("ZCOUNT", base .. ":delayed", "-inf", "(" .. string.format("%.0f", upto + 1))
  number = number + ready + due
  answer[2] = answer[2] - 1
  answer[#answer + 1] = queue
  answer[#answer + 1] = ready
  answer[#answer + 1] = due
end
return answer
