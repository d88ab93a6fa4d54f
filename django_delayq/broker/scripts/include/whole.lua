-- Return a whole number that this package has written; nil for nothing and for anything else, such as "nan" and "inf".
local function whole(text)
  if text and #text <= 16 and string.find(text, "^%d+$") then
    return tonumber(text)
  end
end
