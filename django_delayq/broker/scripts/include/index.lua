-- Return when a queue needs a worker: 0 while ids are ready, else when its first delayed id falls due; nil without ids.
local function needed_at(delayed, ready)
  if redis.call("EXISTS", ready) == 1 then
    return 0
  end
  local first = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")
  return first[2] and math.floor(tonumber(first[2]))
end

-- Write into the index when a queue needs a worker. An entry may be too early, never too late: a take corrects it.
local function note(queues, queue, at)
  local noted = redis.call("ZSCORE", queues, queue)
  if not (noted and at and tonumber(noted) == at) and (noted or at) then
    -- In this order: a full Redis allows a write that adds only after one that could free memory.
    redis.call("ZREM", queues, queue)
    if at then
      redis.call("ZADD", queues, string.format("%.0f", at), queue)
    end
  end
end
