-- Blocked ids: no worker could claim their messages. Each is blocked under the name of the reason. "blocked" holds the name
-- of each id of a queue; a set of its own holds the ids of a name, at their scores in ready. "blocked_counts", which is
-- there once for all queues, has the number of ids of each queue and name.
local function blocked_under(blocked, name)
  return blocked .. ":" .. name
end

local function count_blocked(blocked, blocked_counts, queue, name)
  local number = redis.call("ZCARD", blocked_under(blocked, name))
  if number == 0 then
    redis.call("HDEL", blocked_counts, queue .. ":" .. name)
  else
    redis.call("HSET", blocked_counts, queue .. ":" .. name, number)
  end
end

-- Return whether an id is blocked and can be found. Redis may have lost one of the keys: without the set the id is nowhere,
-- and without the count no worker looks for it.
local function is_blocked(blocked, blocked_counts, queue, id)
  local name = redis.call("HGET", blocked, id)
  if not name or redis.call("HEXISTS", blocked_counts, queue .. ":" .. name) == 0 then
    return false
  end
  return redis.call("ZSCORE", blocked_under(blocked, name), id) and true
end

-- Make an id blocked no more, and put it nowhere. Returns the score that it had in ready; nothing when it was not blocked.
local function unblock(blocked, blocked_counts, queue, id)
  local name = redis.call("HGET", blocked, id)
  if not name then
    return nil
  end
  local score = redis.call("ZSCORE", blocked_under(blocked, name), id)
  redis.call("ZREM", blocked_under(blocked, name), id)
  redis.call("HDEL", blocked, id)
  count_blocked(blocked, blocked_counts, queue, name)
  return score
end
