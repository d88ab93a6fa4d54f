-- Move messages that are due to ready, earliest first, then pop up to limit of the ready ones, best rank first and the
-- longest overdue first within a rank. When there are fewer, also take messages that fall due within the next tenths
-- ("within"). These do not become ready first: then another worker could take them.
-- Before that, blocked ids become ready again, at their old scores: the first ones of the given names, each followed by the
-- number of ids.
-- With "both_ends" half of the limit are the last ones of the best rank, and come after the first ones.
-- A ready message that falls due later still, since the clock of who moved it was wrong, is moved back to delayed.
-- Returns the number of ids that were moved, that of those left in ready, the due tenth of the next ("" when none is
-- delayed) and of another queue (0 while ids are ready there, "" when there is none), and 1 while ids of any queue are
-- blocked, else 0, then id, ready score, id, ready score, … The score holds the due time, in the future for a message that
-- is taken early.
local delayed, ready, meta, wake, queues, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local blocked, blocked_counts = KEYS[7], KEYS[8]
local now, limit, batch, within = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local both_ends, identity, queue, names = ARGV[5], ARGV[6], ARGV[7], 8
-- @include scores
-- @include notify
-- @include owner
-- @include index
-- @include blocked
if is_foreign(meta, identity) then
  return FOREIGN
end
local due = redis.call("ZRANGEBYSCORE", delayed, "-inf", "(" .. string.format("%.0f", now + 1), "WITHSCORES", "LIMIT", 0, batch)
if #due > 0 then
  local ids, scores = {}, {}
  for i = 1, #due, 2 do
    local score = tonumber(due[i + 1])
    ids[#ids + 1] = due[i]
    scores[#scores + 1], scores[#scores + 2] = ready_score(math.floor(score), rank_of(score)), due[i]
  end
  -- In this order: a full Redis allows the second write only after the first, which frees memory.
  redis.call("ZREM", delayed, unpack(ids))
  redis.call("ZADD", ready, unpack(scores))
end
local any_blocked = redis.call("EXISTS", blocked_counts)
if any_blocked == 1 then
  for i = names, #ARGV, 2 do
    local name = ARGV[i]
    local first = redis.call("ZRANGE", blocked_under(blocked, name), 0, tonumber(ARGV[i + 1]) - 1, "WITHSCORES")
    local ids, scores = {}, {}
    for n = 1, #first, 2 do
      ids[#ids + 1] = first[n]
      scores[#scores + 1], scores[#scores + 2] = first[n + 1], first[n]
    end
    if #ids > 0 then
      redis.call("ZREM", blocked_under(blocked, name), unpack(ids))
      redis.call("HDEL", blocked, unpack(ids))
      redis.call("ZADD", ready, unpack(scores))
    end
    -- Also of a set that was lost alone: nobody looks for it again.
    count_blocked(blocked, blocked_counts, queue, name)
  end
end
local answer = {#due / 2, 0, "", "", any_blocked}
local last = {}
if both_ends == "1" and redis.call("ZCARD", ready) > limit then
  local rank = math.floor(tonumber(redis.call("ZRANGE", ready, 0, 0, "WITHSCORES")[2]) / BAND)
  local from, upto = ready_score(0, rank), ready_score(now + within, rank)
  local half = math.floor(limit / 2)
  last = redis.call("ZREVRANGEBYSCORE", ready, string.format("%.0f", upto), string.format("%.0f", from), "WITHSCORES", "LIMIT", 0, half)
  local ids = {}
  for i = 1, #last, 2 do
    ids[#ids + 1] = last[i]
  end
  if #ids > 0 then
    redis.call("ZREM", ready, unpack(ids))
  end
end
local room, early, is_empty = limit - #last / 2, 0, false
while room > 0 and early < batch do
  local popped = redis.call("ZPOPMIN", ready, math.min(room, batch - early))
  if #popped == 0 then
    is_empty = true
    break
  end
  for i = 1, #popped, 2 do
    local score = tonumber(popped[i + 1])
    local since = score % BAND
    if since > now + within then
      redis.call("ZADD", delayed, delayed_score(since, math.floor(score / BAND)), popped[i])
      early = early + 1
    else
      answer[#answer + 1] = popped[i]
      answer[#answer + 1] = popped[i + 1]
      room = room - 1
    end
  end
end
for i = #last - 1, 1, -2 do
  answer[#answer + 1] = last[i]
  answer[#answer + 1] = last[i + 1]
end
-- With as many as a call may move, there may be more.
answer[1] = math.max(answer[1], early)
if room > 0 and within > 0 then
  local upto = "(" .. string.format("%.0f", now + within + 1)
  local soon = redis.call("ZRANGEBYSCORE", delayed, "-inf", upto, "WITHSCORES", "LIMIT", 0, room)
  local ids = {}
  for i = 1, #soon, 2 do
    local score = tonumber(soon[i + 1])
    ids[#ids + 1] = soon[i]
    answer[#answer + 1] = soon[i]
    answer[#answer + 1] = string.format("%.0f", ready_score(math.floor(score), rank_of(score)))
  end
  if #ids > 0 then
    redis.call("ZREM", delayed, unpack(ids))
  end
end
answer[2] = is_empty and 0 or redis.call("ZCARD", ready)
local head = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")
if head[2] then
  answer[3] = string.format("%.0f", math.floor(tonumber(head[2])))
end
note(queues, queue, answer[2] > 0 and 0 or head[2] and math.floor(tonumber(head[2])) or nil)
local first = redis.call("ZRANGE", queues, 0, 1, "WITHSCORES")
local other = first[2]
if first[1] == queue then
  other = first[4]
end
if other then
  answer[4] = other
end
if answer[2] > 0 then
  notify(wake)
  notify(wake_all)
end
return answer
