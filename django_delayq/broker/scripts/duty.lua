-- Hold the duty of doing what one process does for all, or give it up with lease "".
-- Returns 1 when the worker holds it, else 0.
local duty = KEYS[1]
local worker, lease = ARGV[1], ARGV[2]
local holder = redis.call("TYPE", duty).ok == "string" and redis.call("GET", duty)
if holder and holder ~= worker then
  return 0
end
if lease == "" then
  redis.call("DEL", duty)
  return 0
end
redis.call("SET", duty, worker, "PX", lease)
return 1
