-- Delete the keys of a queue that are of another type than ours. Redis is loaded from the beginning then.
-- Returns 1 when an id may have been lost with them, else 0.
local delayed, ready, wake, meta = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- @include types
drop_wrong(wake, "list")
local was_delayed, was_ready = drop_wrong(delayed, "zset"), drop_wrong(ready, "zset")
if was_delayed or was_ready then
  redis.call("HDEL", meta, "loaded")
  return 1
end
return 0
