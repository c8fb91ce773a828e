// Read by ProcessGroupGloo.hpp; see gloo/algorithm.h here for why.
#pragma once
