-- The scores in delayed and ready. A double and "%.17g" keep both exactly: they are below 2^53 or have a fraction of 256ths.
-- delayed: due + rank / 256, so that due times sort first and the better rank first within one of them.
-- ready: rank * 2^45 + due, so that rank sorts first and the longest overdue first within a rank.
local RANKS, BAND = 256, 35184372088832

local function delayed_score(due, rank)
  return due + rank / RANKS
end

local function ready_score(due, rank)
  return rank * BAND + due
end

local function rank_of(score)
  return (score - math.floor(score)) * RANKS
end
