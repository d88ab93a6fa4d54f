-- Return whether the owner is another database than the caller's ("": the caller does not mind).
local function is_another(owner, identity)
  return identity ~= "" and owner and owner ~= identity
end

-- The answer to a caller whose database is not the owner's: an error, as broker/connection.py knows it. It ends with
-- the identity that is refused, since the caller may know another one by the time that it reads this.
local FOREIGN = redis.error_reply("FOREIGN ids of another database than " .. identity)
-- Return whether the queue belongs to another database. It belongs to the first that loads it.
local function is_foreign(meta, identity)
  return is_another(redis.call("HGET", meta, "identity"), identity)
end
