-- Begin to load the record up to a new horizon. Puts made from now on see the new horizon. So there is no gap: the
-- query that follows finds rows committed before, and rows committed later are put by their own writers.
-- A horizon that is farther away than the caller would set it was set with another HORIZON: then the queue is loaded from
-- the beginning, up to a new horizon. A loader that claims more time than any gets is ignored.
-- The caller sets lost = "1" when it knows that Redis was lost or rolled back.
-- Returns "ok", the due tenth to load from ("" for the beginning) and the horizon; or "busy".
local meta = KEYS[1]
local now, ahead, worker, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local identity, run_id, replid, lost = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
-- @include owner
-- In tenths of a ms: what the clocks of loaders may have moved since, and the longest lease of a loader.
local SLACK, LONGEST_LEASE = 100000, 600000
if is_foreign(meta, identity) then
  return FOREIGN
end
local loader = redis.call("HGET", meta, "loader")
local loader_until = tonumber(redis.call("HGET", meta, "loader_until") or "0")
if loader and loader ~= worker and loader_until > now and loader_until <= now + LONGEST_LEASE then
  return {"busy", "", ""}
end
local horizon = tonumber(redis.call("HGET", meta, "horizon") or "")
if not horizon or horizon > now + ahead + SLACK then
  lost, horizon = "1", 0
end
local loaded = tonumber(redis.call("HGET", meta, "loaded") or "")
if not loaded or loaded > horizon then
  lost = "1"
end
if lost == "1" or redis.call("HGET", meta, "run_id") ~= run_id or redis.call("HGET", meta, "replid") ~= replid then
  redis.call("HDEL", meta, "loaded")
end
if redis.call("HEXISTS", meta, "loaded") == 0 then
  -- Ahead of every tick that a process has read, so that none of them sees the same loss again.
  local tick = tonumber(redis.call("HGET", meta, "tick") or "") or 0
  redis.call("HSET", meta, "tick", string.format("%.0f", math.max(now, tick)))
end
horizon = math.max(now + ahead, horizon)
redis.call("HDEL", meta, "requested")
redis.call(
  "HSET", meta,
  "identity", identity, "run_id", run_id, "replid", replid, "horizon", string.format("%.0f", horizon),
  "loader", worker, "loader_until", string.format("%.0f", now + lease)
)
return {"ok", redis.call("HGET", meta, "loaded") or "", string.format("%.0f", horizon)}
