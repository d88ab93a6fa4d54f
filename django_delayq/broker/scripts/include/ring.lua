-- One token is enough: whoever takes it looks at the whole queue. A waiting client gets it at once.
local function ring(wake)
  if redis.call("LLEN", wake) == 0 then
    -- There is no such key, and nothing is removed; but after a write that frees a full Redis allows the push.
    redis.call("ZREM", wake, "1")
    redis.call("LPUSH", wake, "1")
  end
end
