-- Put messages into the location for their due time: ready when due, delayed when due up to the horizon, else nowhere.
-- A process that changed a message uses mode "set", which replaces its location. A process that read rows, perhaps older
-- ones, uses mode "fill", which adds what is missing and makes nothing later.
-- Entries: id, due tenth, rank, id, due tenth, rank, …
-- Returns "ok" and how many were put, were present and are due beyond the horizon; or "lost" when there is no horizon.
local delayed, ready, meta, wake, queues, wake_all = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local blocked, blocked_counts = KEYS[7], KEYS[8]
local now, mode, identity, queue, entries = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], 5
-- @include scores
-- @include owner
-- @include notify
-- @include index
-- @include blocked
local known = redis.call("HMGET", meta, "horizon", "identity")
if is_another(known[2], identity) then
  return FOREIGN
end
local horizon = tonumber(known[1] or "")
if horizon == nil then
  return {"lost", 0, 0, 0}
end
local head = redis.call("ZRANGE", delayed, 0, 0, "WITHSCORES")
local earliest = tonumber(head[2] or "")
local put, present, beyond, wanted = 0, 0, 0, false
-- Nothing is ready in a set that does not exist.
local any_ready = redis.call("EXISTS", ready) == 1
local any_blocked = redis.call("EXISTS", blocked) == 1
-- What goes into delayed with one call: ids, and scores with their ids.
local ids, scores = {}, {}
local function add()
  if #ids == 0 then
    return
  end
  if mode == "set" then
    if any_ready then
      redis.call("ZREM", ready, unpack(ids))
    end
    redis.call("ZADD", delayed, unpack(scores))
    put = put + #ids
  else
    local changed = redis.call("ZADD", delayed, "LT", "CH", unpack(scores))
    put, present = put + changed, present + #ids - changed
  end
  ids, scores = {}, {}
end
for i = entries, #ARGV, 3 do
  local id, due, rank = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  -- An id stays blocked until somebody changes its message.
  local stays_blocked = any_blocked and mode == "fill" and is_blocked(blocked, blocked_counts, queue, id)
  if any_blocked and not stays_blocked then
    unblock(blocked, blocked_counts, queue, id)
  end
  if stays_blocked then
    present = present + 1
  elseif due <= now then
    -- An id may come twice: its last entry counts.
    add()
    if redis.call("ZSCORE", ready, id) then
      if mode == "set" then
        redis.call("ZADD", ready, ready_score(due, rank), id)
      end
      present = present + 1
    else
      if redis.call("ZREM", delayed, id) == 1 then
        present = present + 1
      else
        put = put + 1
      end
      redis.call("ZADD", ready, ready_score(due, rank), id)
      any_ready, wanted = true, true
    end
  elseif mode == "fill" and any_ready and redis.call("ZSCORE", ready, id) then
    present = present + 1
  elseif due > horizon then
    if mode == "set" then
      add()
      redis.call("ZREM", delayed, id)
      redis.call("ZREM", ready, id)
    end
    beyond = beyond + 1
  else
    local score = delayed_score(due, rank)
    ids[#ids + 1], scores[#scores + 1], scores[#scores + 2] = id, score, id
    if earliest == nil or score < earliest then
      earliest = score
      wanted = true
    end
  end
end
add()
if wanted or mode == "fill" then
  note(queues, queue, any_ready and 0 or earliest and math.floor(earliest))
end
if wanted then
  notify(wake)
  notify(wake_all)
end
return {"ok", put, present, beyond}
