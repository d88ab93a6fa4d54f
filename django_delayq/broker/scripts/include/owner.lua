-- Return whether the queue belongs to another database than the caller's ("": the caller does not mind). It belongs to
-- the first that loads it.
local function is_foreign(meta, identity)
  local owner = redis.call("HGET", meta, "identity")
  return identity ~= "" and owner and owner ~= identity
end
