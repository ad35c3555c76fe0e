/* All sums of rows of fp32 values in one pass over the memory; see digest.py, which defines them.

Inner loops have no order of additions to keep, so that any compiler makes vectors of them. */

#include <stdint.h>
#include <string.h>

enum { GROUP = 127, GROUPS_AT_ONCE = 64, LANES = 16, PLACES = 128 };

typedef struct { /* of each place in a group, over its columns */
    float sum[PLACES], squares[PLACES];
    int32_t largest[PLACES]; /* bits of magnitudes, in the order of magnitudes; NaN is above */
} Row;

static void add_group(Row *to, float *restrict folded, int64_t place, const float *restrict x,
                      int64_t count, float sign)
{
    float *restrict sum = to->sum + place, *restrict squares = to->squares + place;
    int32_t *restrict largest = to->largest + place;
    folded += place;
    for (int64_t j = 0; j < count; j++) {
        int32_t magnitude;
        memcpy(&magnitude, x + j, sizeof magnitude);
        magnitude &= 0x7fffffff;
        folded[j] += sign * x[j];
        sum[j] += x[j];
        squares[j] += x[j] * x[j];
        largest[j] = magnitude > largest[j] ? magnitude : largest[j];
    }
}

static void finish(const Row *from, float *sum, float *squares, float *largest)
{
    float sums[LANES] = {0}, square[LANES] = {0};
    int32_t most[LANES] = {0};
    for (int j = 0; j < PLACES; j += LANES)
        for (int k = 0; k < LANES; k++) {
            sums[k] += from->sum[j + k];
            square[k] += from->squares[j + k];
            most[k] = from->largest[j + k] > most[k] ? from->largest[j + k] : most[k];
        }
    for (int k = 1; k < LANES; k++) {
        sums[0] += sums[k];
        square[0] += square[k];
        most[0] = most[k] > most[0] ? most[k] : most[0];
    }
    *sum = sums[0];
    *squares = square[0];
    memcpy(largest, most, sizeof *largest);
}

/* Adds groups of 127 columns, each with its sign; of each row and part of 64 groups.

x        [rows, columns], stride: from a row to the next
first    place of the first column in its group
signs    of the groups that the columns are of
folded   [rows, parts, 127], zeros
sum, squares, largest: [rows, parts] */
void fold_rows(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t first,
               const float *signs, float *folded, float *sum, float *squares, float *largest)
{
    for (int64_t i = 0; i < rows; i++, x += stride) {
        int64_t begin = 0, place = first, group = 0;
        while (begin < columns) {
            Row row = {0};
            const int64_t end = group + GROUPS_AT_ONCE;
            for (; begin < columns && group < end; group++, place = 0) {
                const int64_t room = GROUP - place, left = columns - begin;
                const int64_t count = room < left ? room : left;
                add_group(&row, folded, place, x + begin, count, signs[group]);
                begin += count;
            }
            finish(&row, sum++, squares++, largest++);
            folded += GROUP;
        }
    }
}

static inline uint64_t without_sign_of_zero(uint32_t bits)
{
    return bits == 0x80000000u ? 0 : bits;
}

/* Of each row: the sum of pairs of values, as words of 64 bits, times factors [columns / 2]. */
void exact_rows(const uint32_t *x, int64_t rows, int64_t columns, int64_t stride,
                const uint64_t *factors, uint64_t *sums)
{
    for (int64_t i = 0; i < rows; i++, x += stride) {
        uint64_t sum = 0;
        for (int64_t j = 0; j < columns; j += 2)
            sum += (without_sign_of_zero(x[j]) | without_sign_of_zero(x[j + 1]) << 32)
                   * factors[j / 2];
        sums[i] = sum;
    }
}
