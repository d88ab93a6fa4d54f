-- Return whether the owner is another database than the caller's ("": the caller does not mind).
local function is_another(owner, identity)
  return identity ~= "" and owner and owner ~= identity
end

-- Return whether the queue belongs to another database. It belongs to the first that loads it.
local function is_foreign(meta, identity)
  return is_another(redis.call("HGET", meta, "identity"), identity)
end
