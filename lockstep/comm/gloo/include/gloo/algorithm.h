// LibTorch exports ProcessGroupGloo but ships none of gloo's headers. These few declarations are
// all that its header needs to be read; nothing here is ever constructed or laid out by us.
#pragma once
