/* CRC-32 of zlib: folded by carry-less multiplication where the processor has it, else eight bytes a step.

   The folding is that of Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009), in
   its bit-reflected form; the constants are powers of x modulo the polynomial. */

#ifndef LIBRMQ_CRC32_H
#define LIBRMQ_CRC32_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t rmq_table[8][256];

static void rmq_crc32_init(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t code = byte;
        for (int bit = 0; bit < 8; bit++)
            code = code >> 1 ^ (code & 1 ? 0xEDB88320u : 0);
        rmq_table[0][byte] = code;
    }
    for (int row = 1; row < 8; row++)
        for (int byte = 0; byte < 256; byte++)
            rmq_table[row][byte] = rmq_table[row - 1][byte] >> 8 ^ rmq_table[0][rmq_table[row - 1][byte] & 255];
}

static inline uint32_t rmq_little(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint32_t rmq_crc32_tables(uint32_t code, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t low = rmq_little(data) ^ code, high = rmq_little(data + 4);
        code = rmq_table[7][low & 255] ^ rmq_table[6][low >> 8 & 255] ^ rmq_table[5][low >> 16 & 255] ^
               rmq_table[4][low >> 24] ^ rmq_table[3][high & 255] ^ rmq_table[2][high >> 8 & 255] ^
               rmq_table[1][high >> 16 & 255] ^ rmq_table[0][high >> 24];
    }
    for (; size; data++, size--)
        code = code >> 8 ^ rmq_table[0][(code ^ *data) & 255];
    return code;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define LIBRMQ_FOLDS 1
#include <immintrin.h>

#define FOLD(x, by, next)                                                                                        \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next)
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))

/* Folds 128 bytes a step into `state`, which has the first 128; returns how many bytes it took. */
__attribute__((target("vpclmulqdq,avx2"))) static size_t rmq_fold_wide(void *state, const uint8_t *data, size_t size) {
    const __m256i by_128 = _mm256_set_epi64x(0x014a7fe880, 0x01e88ef372, 0x014a7fe880, 0x01e88ef372);
    __m256i x[4];
    size_t at = 128;
    memcpy(x, state, 128);
    for (; size - at >= 128; at += 128)
        for (int part = 0; part < 4; part++)
            x[part] = _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(x[part], by_128, 0x00),
                                                        _mm256_clmulepi64_epi128(x[part], by_128, 0x11)),
                                       _mm256_loadu_si256((const __m256i *)(data + at) + part));
    memcpy(state, x, 128);
    return at;
}

/* Of shuffles by which bytes move up or down in a vector: at 16 + n by n down, at n by 16 - n up; zeros follow. */
static const uint8_t rmq_shifts[48] = {
    128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 0,   1,   2,   3,   4,   5,   6,   7,
    8,   9,   10,  11,  12,  13,  14,  15,  128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128};

/* Of at least 16 bytes. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t rmq_crc32_folded(uint32_t code, const uint8_t *data, size_t size,
                                                                           int wide) {
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_48 = _mm_set_epi64x(0x0174359406, 0x003db1ecdc), by_32 = _mm_set_epi64x(0x015a546366, 0x00f1da05aa);
    const __m128i last = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_set_epi32(0, -1, 0, -1);
    __m128i a = _mm_xor_si128(LOAD(data), _mm_cvtsi32_si128((int)code)), b, c, d;
    if (size < 64) {
        data += 16, size -= 16;
    } else {
        b = LOAD(data + 16), c = LOAD(data + 32), d = LOAD(data + 48);
        if (wide && size >= 512) {
            __m128i state[8];
            memcpy(state, data, 128);
            state[0] = a;
            size_t taken = rmq_fold_wide(state, data, size) - 64;
            a = FOLD(state[0], by_64, state[4]);
            b = FOLD(state[1], by_64, state[5]);
            c = FOLD(state[2], by_64, state[6]);
            d = FOLD(state[3], by_64, state[7]);
            data += taken, size -= taken;
        }
        for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
            a = FOLD(a, by_64, LOAD(data));
            b = FOLD(b, by_64, LOAD(data + 16));
            c = FOLD(c, by_64, LOAD(data + 32));
            d = FOLD(d, by_64, LOAD(data + 48));
        }
        a = FOLD(a, by_48, FOLD(b, by_32, FOLD(c, by_16, d)));  /* of which none waits for another */
    }
    for (; size >= 16; data += 16, size -= 16)
        a = FOLD(a, by_16, LOAD(data));
    if (size) {  /* the first bytes of the state, as many as are left, go onto the 16 that end the data */
        const __m128i up = LOAD(rmq_shifts + size);
        b = _mm_blendv_epi8(LOAD(data + size - 16), _mm_shuffle_epi8(a, LOAD(rmq_shifts + 16 + size)), up);
        a = FOLD(_mm_shuffle_epi8(a, up), by_16, b);
    }
    a = _mm_xor_si128(_mm_clmulepi64_si128(a, by_16, 0x10), _mm_srli_si128(a, 8));
    b = _mm_srli_si128(a, 4);
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), last, 0x00), b);
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10), low);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, barrett, 0x00));
    return (uint32_t)_mm_extract_epi32(a, 1);
}
#endif

/* The checksum by folding if `folds`, wide if that is 2, which the processor must know. */
static inline uint32_t rmq_crc32(const uint8_t *data, size_t size, int folds) {
#ifdef LIBRMQ_FOLDS
    if (folds && size >= 16)
        return ~rmq_crc32_folded(~0u, data, size, folds > 1);
#endif
    (void)folds;
    return ~rmq_crc32_tables(~0u, data, size);
}

/* Whether a record matches the checksum of itself that RocketMQ 5 can put last in its properties, if it has one:
   a name, ten digits of which the least comes first, and a separator. */
static inline int rmq_is_as_written(const uint8_t *record, size_t size, int folds) {
    uint64_t expected = 0;
    if (record[size - 1] != 2 || memcmp(record + size - 20, "__CRC32#\1", 9))
        return 1;
    for (int digit = 9; digit >= 0; digit--) {
        uint8_t value = record[size - 11 + digit] - '0';
        if (value > 9)
            return 0;
        expected = 10 * expected + value;
    }
    return (rmq_crc32(record, size - 20, folds) & 0x7FFFFFFF) == expected;
}

static int rmq_can_fold(void) {
#ifdef LIBRMQ_FOLDS
    int folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    return folds && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2") ? 2 : folds;
#else
    return 0;
#endif
}

#endif
