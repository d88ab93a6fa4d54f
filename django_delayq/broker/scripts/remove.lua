-- Forget messages, delayed and ready.
-- Returns how many were there; or "foreign" when the queue belongs to another database.
local delayed, ready, meta = KEYS[1], KEYS[2], KEYS[3]
local identity, ids = ARGV[1], 2
-- @include owner
if is_foreign(meta, identity) then
  return "foreign"
end
local removed = 0
for i = ids, #ARGV do
  removed = removed + redis.call("ZREM", delayed, ARGV[i]) + redis.call("ZREM", ready, ARGV[i])
end
return removed
