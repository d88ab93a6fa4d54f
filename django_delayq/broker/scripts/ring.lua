-- Let somebody look at this queue.
-- Returns "ok".
local wake = KEYS[1]
-- @include ring
ring(wake)
return "ok"
