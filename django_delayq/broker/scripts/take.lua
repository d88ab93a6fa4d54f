-- Move messages that are due to ready, earliest first, then pop up to limit of the ready ones, best rank first. When
-- there are fewer, also take messages that fall due within the next tenths ("within"). These do not become ready
-- first: then another worker could take them.
-- Returns how many were moved, how many are left ready, in how many tenths the next falls due ("" when none is delayed)
-- and the time, then id, ready score, id, ready score, … The score of a message that is taken early has a time in the future.
local delayed, ready, wake = KEYS[1], KEYS[2], KEYS[3]
local now, limit, batch, within = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock
-- @include places
-- @include notify
local part
now, part = clock(now)
local due = redis.call("ZRANGEBYSCORE", delayed, "-inf", "(" .. string.format("%.0f", now + 1), "WITHSCORES", "LIMIT", 0, batch)
for i = 1, #due, 2 do
  -- In this order: a full Redis allows the second write only after the first, which frees memory.
  redis.call("ZREM", delayed, due[i])
  redis.call("ZADD", ready, ready_score(now, rank_of(tonumber(due[i + 1]))), due[i])
end
local answer = {#due / 2, 0, "", string.format("%.2f", now + part)}
local room = limit
if limit > 0 then
  local popped = redis.call("ZPOPMIN", ready, limit)
  room = limit - #popped / 2
  for i = 1, #popped, 2 do
    answer[#answer + 1] = popped[i]
    -- The clock may have gone back since. A claim must not see a message that became ready later than now.
    local score = tonumber(popped[i + 1])
    answer[#answer + 1] = string.format("%.0f", score - math.max(0, score % BAND - now))
  end
end
if room > 0 and within > 0 then
  local upto = "(" .. string.format("%.0f", now + within + 1)
  local soon = redis.call("ZRANGEBYSCORE", delayed, "-inf", upto, "WITHSCORES", "LIMIT", 0, room)
  for i = 1, #soon, 2 do
    local score = tonumber(soon[i + 1])
    redis.call("ZREM", delayed, soon[i])
    answer[#answer + 1] = soon[i]
    answer[#answer + 1] = string.format("%.0f", ready_score(math.floor(score), rank_of(score)))
  end
end
answer[2] = redis.call("ZCARD", ready)
local head = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")
if head[2] then
  answer[3] = string.format("%.3f", math.max(0, math.floor(tonumber(head[2])) - now - part))
end
if answer[2] > 0 then
  notify(wake)
end
return answer
