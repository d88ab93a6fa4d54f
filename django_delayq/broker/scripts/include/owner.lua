-- Return whether the owner is another database than the caller's ("": the caller does not mind).
local function is_another(owner, identity)
  return identity ~= "" and owner and owner ~= identity
end

-- The answer to a caller whose database is not the owner's: an error, as broker/connection.py knows it.
local FOREIGN = redis.error_reply("FOREIGN ids of another database")
-- Return whether the queue belongs to another database. It belongs to the first that loads it.
local function is_foreign(meta, identity)
  return is_another(redis.call("HGET", meta, "identity"), identity)
end
