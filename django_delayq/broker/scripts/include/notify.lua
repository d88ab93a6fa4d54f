-- Put a token into the wake list, which a listening worker gets at once. One token is enough: the worker that gets it
-- takes from the whole queue.
local function notify(wake)
  if redis.call("LLEN", wake) == 0 then
    -- There is nothing to remove. But a full Redis allows the push only after a write that could free memory.
    redis.call("ZREM", wake, "1")
    redis.call("LPUSH", wake, "1")
    -- Nobody may listen to this list. A worker looks for due ids by itself long before this time (seconds) is over.
    redis.call("EXPIRE", wake, 60)
  end
end
