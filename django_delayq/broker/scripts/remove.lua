-- Forget messages, delayed and ready.
-- Returns how many were there.
local delayed, ready = KEYS[1], KEYS[2]
local ids = 1
local removed = 0
for i = ids, #ARGV do
  removed = removed + redis.call("ZREM", delayed, ARGV[i]) + redis.call("ZREM", ready, ARGV[i])
end
return removed
