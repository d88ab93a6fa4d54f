-- Have the worker lead a duty, which one process does for all, for the lease (ms); or give the duty up with lease "".
-- Returns 1 when the worker leads, else 0.
local duty = KEYS[1]
local worker, lease = ARGV[1], ARGV[2]
-- A key of another type, which somebody else has written, is an error here: then nobody leads.
local found = redis.pcall("GET", duty)
local holder = type(found) == "string" and found
if holder and holder ~= worker then
  return 0
end
if lease == "" then
  redis.call("DEL", duty)
  return 0
end
redis.call("SET", duty, worker, "PX", lease)
return 1
