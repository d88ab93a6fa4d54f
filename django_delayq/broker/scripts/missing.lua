-- Find messages that have no place, or a place later than their due time. Changes nothing.
-- Entries: id, due tenth, rank, id, due tenth, rank, …
-- Returns their ids.
local delayed, ready = KEYS[1], KEYS[2]
local entries = 1
-- @include places
local missing = {}
for i = entries, #ARGV, 3 do
  local id = ARGV[i]
  if not redis.call("ZSCORE", ready, id) then
    local score = redis.call("ZSCORE", delayed, id)
    if not score or tonumber(score) > delayed_score(tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])) then
      missing[#missing + 1] = id
    end
  end
end
return missing
