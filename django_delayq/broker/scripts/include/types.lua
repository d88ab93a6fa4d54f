-- Delete a key of another type than ours: every script would stumble over it. Return whether it was one.
local function drop_wrong(key, kind)
  local found = redis.call("TYPE", key).ok
  if found == "none" or found == kind then
    return false
  end
  redis.call("DEL", key)
  return true
end
