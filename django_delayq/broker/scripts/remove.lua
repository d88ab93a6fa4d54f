-- Forget messages: delayed, ready and blocked ones.
-- Returns how many were there. Refuses a caller of another database: include/owner.lua.
local delayed, ready, meta, queues, blocked, blocked_counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local identity, queue, ids = ARGV[1], ARGV[2], 3
-- @include owner
-- @include index
-- @include blocked
if is_foreign(meta, identity) then
  return FOREIGN
end
local removed, any_blocked = 0, redis.call("EXISTS", blocked) == 1
for i = ids, #ARGV do
  removed = removed + redis.call("ZREM", delayed, ARGV[i]) + redis.call("ZREM", ready, ARGV[i])
  if any_blocked and unblock(blocked, blocked_counts, queue, ARGV[i]) then
    removed = removed + 1
  end
end
note(queues, queue, needed_at(delayed, ready))
return removed
