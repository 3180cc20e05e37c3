// reshape_and_cache by copying bytes, for any type.
#include "_types.h"

namespace opset {

// All strides and head_bytes are in bytes. Tokens with a negative slot are skipped. If the cache lacks the slot of a
// token, returns the first such token before it writes anything; otherwise returns -1.
extern "C" int64_t reshape_and_cache(const char* key, const char* value, char* cache, const int64_t* slots,
                                     int64_t tokens, int64_t heads, int64_t head_bytes, int64_t key_token,
                                     int64_t key_head, int64_t value_token, int64_t value_head, int64_t num_slots,
                                     int64_t block_size, int64_t cache_block, int64_t cache_head,
                                     int64_t cache_slot) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= num_slots) return token;
    parallel_for(tokens, 1, tokens * heads * head_bytes > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            if (slots[token] < 0) continue;
            char* slot = cache + slots[token] / block_size * cache_block + slots[token] % block_size * cache_slot;
            for (int64_t head = 0; head < heads; head++) {
                char* at = slot + head * cache_head;
                std::memcpy(at, key + token * key_token + head * key_head, head_bytes);
                std::memcpy(at + head_bytes, value + token * value_token + head * value_head, head_bytes);
            }
        }
    });
    return -1;
}

}  // namespace opset
