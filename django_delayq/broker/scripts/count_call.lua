-- Count a call (step 1) in a window, unless this has "most" calls; or take one back (step -1), unless another window has begun.
-- A window begins with its first call, whose name it gets, and ends after the interval (ms), also when this is shortened.
-- Returns the window of the call, "" when it is full, and the milliseconds until it ends.
local calls = KEYS[1]
local window, step, most, interval = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if step < 0 then
  if redis.call("HGET", calls, "window") == window then
    redis.call("HINCRBY", calls, "count", step)
  end
  return {window, 0}
end
if redis.call("HEXISTS", calls, "window") == 0 then
  redis.call("HSET", calls, "window", window)
end
local left = redis.call("PTTL", calls)
if left < 0 or left > interval then
  redis.call("EXPIRE", calls, math.ceil(interval / 1000))
  left = interval
end
if tonumber(redis.call("HGET", calls, "count") or 0) >= most then
  return {"", left}
end
redis.call("HINCRBY", calls, "count", step)
return {redis.call("HGET", calls, "window"), left}
