-- Ids that stand aside because no worker could claim their messages, each under the name of the reason. "aside" holds the
-- name of each id of a queue; a set of its own holds the ids of a name, at their scores in ready. "asides" of all queues
-- counts the ids of each queue and name.
local function siding(aside, name)
  return aside .. ":" .. name
end

local function count_aside(aside, asides, queue, name)
  local number = redis.call("ZCARD", siding(aside, name))
  if number == 0 then
    redis.call("HDEL", asides, queue .. ":" .. name)
  else
    redis.call("HSET", asides, queue .. ":" .. name, number)
  end
end

-- Return whether an id stands aside where somebody finds it. A key may have been lost alone: without the set the id is
-- nowhere, and without the count nobody looks for it.
local function stands_aside(aside, asides, queue, id)
  local name = redis.call("HGET", aside, id)
  if not name or redis.call("HEXISTS", asides, queue .. ":" .. name) == 0 then
    return false
  end
  return redis.call("ZSCORE", siding(aside, name), id) and true
end

-- Take an id out of the place where it stands aside. Returns its score there; nothing when it does not stand aside.
local function leave_aside(aside, asides, queue, id)
  local name = redis.call("HGET", aside, id)
  if not name then
    return nil
  end
  local score = redis.call("ZSCORE", siding(aside, name), id)
  redis.call("ZREM", siding(aside, name), id)
  redis.call("HDEL", aside, id)
  count_aside(aside, asides, queue, name)
  return score
end
