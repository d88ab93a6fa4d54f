-- Wake one worker that listens to this queue, or the next one that does.
-- Returns "ok".
local wake = KEYS[1]
-- @include notify
notify(wake)
return "ok"
