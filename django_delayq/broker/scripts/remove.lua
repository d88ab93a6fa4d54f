-- Forget messages: delayed, ready and aside.
-- Returns how many were there. Refuses a caller of another database: include/owner.lua.
local delayed, ready, meta, queues, aside, asides = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local identity, queue, ids = ARGV[1], ARGV[2], 3
-- @include owner
-- @include index
-- @include aside
if is_foreign(meta, identity) then
  return FOREIGN
end
local removed, any_aside = 0, redis.call("EXISTS", aside) == 1
for i = ids, #ARGV do
  removed = removed + redis.call("ZREM", delayed, ARGV[i]) + redis.call("ZREM", ready, ARGV[i])
  if any_aside and leave_aside(aside, asides, queue, ARGV[i]) then
    removed = removed + 1
  end
end
note(queues, queue, needed_at(delayed, ready))
return removed
