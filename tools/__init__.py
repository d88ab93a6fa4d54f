"""Commands for those who keep the project: releases, pictures, and the table of sizes."""
