-- Forget messages, delayed and ready.
-- Returns how many were there; or "foreign" when Redis holds the ids of another database.
local delayed, ready, meta, queues = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local identity, queue, ids = ARGV[1], ARGV[2], 3
-- @include owner
-- @include index
if is_foreign(meta, identity) then
  return "foreign"
end
local removed = 0
for i = ids, #ARGV do
  removed = removed + redis.call("ZREM", delayed, ARGV[i]) + redis.call("ZREM", ready, ARGV[i])
end
note(queues, queue, needed_at(delayed, ready))
return removed
