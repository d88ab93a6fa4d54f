-- Have the loader load the record again from the beginning: a process could not tell Redis of messages for a while. A load
-- that is under way may have read past them.
-- Returns "ok". Refuses a caller of another database: include/owner.lua.
local meta = KEYS[1]
local identity = ARGV[1]
-- @include owner
if is_foreign(meta, identity) then
  return FOREIGN
end
if redis.call("HEXISTS", meta, "horizon") == 1 then
  redis.call("HDEL", meta, "loaded")
  redis.call("HSET", meta, "requested", "1")
end
return "ok"
