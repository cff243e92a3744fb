// Command franz does with franz-go what applications do, one scenario a run, and fails with a reason.
//
//	franz SCENARIO BOOTSTRAP NAME
//
// NAME is for topics, groups and transactional ids; nobody else may use it.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	patience   = 30 * time.Second
	partitions = 6
	session    = 6 * time.Second
	largeBytes = 2_000_000
	many       = 200
)

type run struct {
	ctx       context.Context
	bootstrap string
	name      string
}

var scenarios = map[string]func(*run){
	"versions":     versions,
	"codecs":       codecs,
	"records":      records,
	"large":        large,
	"group":        group,
	"group-848":    group848,
	"static":       static,
	"transactions": transactions,
	"admin":        admin,
	"reset":        reset,
	"policy":       policy,
	"partitions":   manyPartitions,
	"quotas":       quotas,
}

func main() {
	if len(os.Args) != 4 || scenarios[os.Args[1]] == nil {
		fail("usage: franz SCENARIO BOOTSTRAP NAME")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	scenarios[os.Args[1]](&run{ctx, os.Args[2], os.Args[3]})
	fmt.Println("ok")
}

func fail(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
	os.Exit(1)
}

func must(err error, what string) {
	if err != nil {
		fail("%s: %v", what, err)
	}
}

func expect(holds bool, format string, arguments ...any) {
	if !holds {
		fail(format, arguments...)
	}
}

func (r *run) client(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(r.bootstrap)}, options...)...)
	must(err, "new client")
	return client
}

func (r *run) create(count int32, configs map[string]*string) *kadm.Client {
	admin := kadm.NewClient(r.client())
	_, err := admin.CreateTopic(r.ctx, count, 1, configs, r.name)
	must(err, "create topic")
	return admin
}

func (r *run) produce(client *kgo.Client, sent ...*kgo.Record) {
	must(client.ProduceSync(r.ctx, sent...).FirstErr(), "produce")
}

// read returns the first count records, by offset.
func (r *run) read(client *kgo.Client, count int) []*kgo.Record {
	var found []*kgo.Record
	for len(found) < count {
		fetches := client.PollFetches(r.ctx)
		must(fetches.Err(), "poll")
		found = append(found, fetches.Records()...)
	}
	expect(len(found) == count, "%d records came, %d were sent", len(found), count)
	return found
}

func numbered(topic string, count int) []*kgo.Record {
	var made []*kgo.Record
	for i := range count {
		made = append(made, &kgo.Record{Topic: topic, Key: fmt.Appendf(nil, "key-%d", i), Value: fmt.Appendf(nil, "value-%d", i)})
	}
	return made
}

// versions: this client opens with a version of ApiVersions that no broker may know, and must find its way.
func versions(r *run) {
	client := r.client()
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "franz", "1"
	response, err := request.RequestWith(r.ctx, client)
	must(err, "ApiVersions")
	must(kerr.ErrorForCode(response.ErrorCode), "ApiVersions")
	expect(len(response.ApiKeys) > 40, "only %d keys", len(response.ApiKeys))
}

func codecs(r *run) {
	r.create(1, nil)
	all := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	for name, codec := range all {
		client := r.client(kgo.ProducerBatchCompression(codec))
		var sent []*kgo.Record
		for i := range 100 {
			sent = append(sent, &kgo.Record{Topic: r.name, Key: []byte(name), Value: bytes.Repeat([]byte{byte(i)}, 100)})
		}
		r.produce(client, sent...)
		client.Close()
	}
	counts := map[string]int{}
	for _, record := range r.read(r.client(kgo.ConsumeTopics(r.name)), 500) {
		name := string(record.Key)
		expect(bytes.Equal(record.Value, bytes.Repeat([]byte{byte(counts[name])}, 100)), "%s: wrong value", name)
		counts[name]++
	}
	expect(len(counts) == len(all), "codecs read: %v", counts)
}

func records(r *run) {
	admin := r.create(1, nil)
	ends, err := admin.ListEndOffsets(r.ctx, r.name)
	must(err, "end offsets")
	end, _ := ends.Lookup(r.name, 0)
	expect(end.Offset == 0, "an empty topic ends at %d", end.Offset)
	client := r.client(kgo.ConsumeTopics(r.name))
	soon, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond)
	expect(client.PollFetches(soon).NumRecords() == 0, "an empty topic has records")
	cancel()
	headers := []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a", Value: nil}, {Key: "→", Value: []byte{}}}
	r.produce(client,
		&kgo.Record{Topic: r.name, Key: nil, Value: []byte("no key")},
		&kgo.Record{Topic: r.name, Key: []byte("no value"), Value: nil},
		&kgo.Record{Topic: r.name, Key: []byte{}, Value: []byte{}},
		&kgo.Record{Topic: r.name, Key: []byte("headers"), Value: []byte("v"), Headers: headers},
	)
	found := r.read(client, 4)
	expect(found[0].Key == nil && string(found[0].Value) == "no key", "null key: %v", found[0])
	expect(found[1].Value == nil, "null value: %v", found[1].Value)
	expect(found[2].Key != nil && found[2].Value != nil, "empty is not null")
	expect(len(found[3].Headers) == 3 && found[3].Headers[1].Value == nil && found[3].Headers[2].Key == "→",
		"headers: %v", found[3].Headers)
}

func large(r *run) {
	limit := "3000000"
	r.create(1, map[string]*string{"max.message.bytes": &limit})
	value := make([]byte, largeBytes)
	rand.New(rand.NewSource(1)).Read(value)
	client := r.client(
		kgo.ConsumeTopics(r.name), kgo.ProducerBatchMaxBytes(3_000_000), kgo.ProducerBatchCompression(kgo.NoCompression()),
	)
	r.produce(client, &kgo.Record{Topic: r.name, Value: value})
	expect(bytes.Equal(r.read(client, 1)[0].Value, value), "2 MB came back changed")
}

// member reads until it is closed, and counts what it has.
type member struct {
	client *kgo.Client
	mutex  sync.Mutex
	shares map[int32]bool
	moves  int
	read   int
	done   chan struct{}
}

func (r *run) join(options ...kgo.Opt) *member {
	m := &member{shares: map[int32]bool{}, done: make(chan struct{})}
	gone := func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
		m.mutex.Lock()
		defer m.mutex.Unlock()
		for _, partition := range lost[r.name] {
			delete(m.shares, partition)
			m.moves++
		}
	}
	m.client = r.client(append([]kgo.Opt{
		kgo.ConsumerGroup(r.name), kgo.ConsumeTopics(r.name), kgo.SessionTimeout(session),
		kgo.HeartbeatInterval(100 * time.Millisecond), kgo.FetchMaxWait(100 * time.Millisecond),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) {
			m.mutex.Lock()
			defer m.mutex.Unlock()
			for _, partition := range got[r.name] {
				m.shares[partition] = true
				m.moves++
			}
		}),
		kgo.OnPartitionsRevoked(func(ctx context.Context, client *kgo.Client, lost map[string][]int32) {
			must(client.CommitUncommittedOffsets(ctx), "commit")
			gone(ctx, client, lost)
		}),
		kgo.OnPartitionsLost(gone),
	}, options...)...)
	go func() {
		defer close(m.done)
		for {
			fetches := m.client.PollFetches(r.ctx)
			if fetches.IsClientClosed() || r.ctx.Err() != nil {
				return
			}
			m.mutex.Lock()
			m.read += fetches.NumRecords()
			m.mutex.Unlock()
		}
	}()
	return m
}

func (m *member) close() {
	m.client.Close()
	<-m.done
}

func (m *member) has() []int32 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	var shares []int32
	for partition := range m.shares {
		shares = append(shares, partition)
	}
	sort.Slice(shares, func(i, j int) bool { return shares[i] < shares[j] })
	return shares
}

func (m *member) count(what func(*member) int) int {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return what(m)
}

func readCount(m *member) int { return m.read }
func moveCount(m *member) int { return m.moves }

func await(what string, holds func() bool) {
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		expect(time.Now().Before(deadline), "%s: not within %v", what, patience)
	}
}

// shared: these members have all partitions among them, each as many as the others.
func shared(members ...*member) bool {
	seen := map[int32]bool{}
	for _, m := range members {
		shares := m.has()
		if len(shares) != partitions/len(members) {
			return false
		}
		for _, partition := range shares {
			seen[partition] = true
		}
	}
	return len(seen) == partitions
}

func group(r *run) { r.share() }

// group848: the broker assigns (KIP-848).
func group848(r *run) { r.share(kgo.ServerSideBalancer()) }

func (r *run) share(options ...kgo.Opt) {
	admin := r.create(partitions, nil)
	first := r.join(options...)
	await("one has all", func() bool { return shared(first) })
	second, third := r.join(options...), r.join(options...)
	await("three share", func() bool { return shared(first, second, third) })
	r.produce(r.client(), numbered(r.name, 600)...)
	await("all is read", func() bool {
		return first.count(readCount)+second.count(readCount)+third.count(readCount) == 600
	})
	first.close()
	await("two share", func() bool { return shared(second, third) })
	second.close()
	third.close()
	offsets, err := admin.FetchOffsets(r.ctx, r.name)
	must(err, "fetch offsets")
	var total int64
	offsets.Each(func(offset kadm.OffsetResponse) { total += offset.At })
	expect(total == 600, "%d of 600 records are committed", total)
}

func static(r *run) {
	r.create(partitions, nil)
	stays, goes := r.join(kgo.InstanceID("stays")), r.join(kgo.InstanceID("goes"))
	await("two share", func() bool { return shared(stays, goes) })
	share, moves := fmt.Sprint(goes.has()), stays.count(moveCount)
	goes.close()
	back := r.join(kgo.InstanceID("goes"))
	await("the share is back", func() bool { return fmt.Sprint(back.has()) == share })
	expect(stays.count(moveCount) == moves, "the member that stayed was rebalanced")
	back.close()
	stays.close()
}

func transactions(r *run) {
	r.create(1, nil)
	client := r.client(kgo.TransactionalID(r.name), kgo.DefaultProduceTopic(r.name))
	for i, commit := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit} {
		must(client.BeginTransaction(), "begin")
		for j := range 10 {
			r.produce(client, &kgo.Record{Value: fmt.Appendf(nil, "%d-%d", i, j)})
		}
		must(client.EndTransaction(r.ctx, commit), "end")
	}
	reader := r.client(kgo.ConsumeTopics(r.name), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	found := r.read(reader, 20)
	expect(string(found[9].Value) == "0-9" && string(found[10].Value) == "2-0", "aborted records were read")
	r.copy()
}

// copy consumes, and produces in the transaction that commits what was consumed.
func (r *run) copy() {
	target := r.name + "-copy"
	_, err := kadm.NewClient(r.client()).CreateTopic(r.ctx, 1, 1, nil, target)
	must(err, "create topic")
	worker, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(r.bootstrap), kgo.TransactionalID(r.name+"-copy"), kgo.ConsumerGroup(r.name+"-copy"),
		kgo.ConsumeTopics(r.name), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets(),
	)
	must(err, "new session")
	for copied := 0; copied < 20; {
		fetches := worker.PollFetches(r.ctx)
		must(fetches.Err(), "poll")
		must(worker.Begin(), "begin")
		fetches.EachRecord(func(record *kgo.Record) {
			worker.Produce(r.ctx, &kgo.Record{Topic: target, Value: record.Value}, nil)
			copied++
		})
		committed, err := worker.End(r.ctx, kgo.TryCommit)
		must(err, "end")
		expect(committed, "the transaction was not committed")
	}
	worker.Close()
	reader := r.client(kgo.ConsumeTopics(target), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	expect(string(r.read(reader, 20)[19].Value) == "2-9", "the copy is not the original")
}

func admin(r *run) {
	retention := "60000"
	admin := r.create(2, map[string]*string{"retention.ms": &retention})
	_, err := admin.CreateTopic(r.ctx, 1, 1, nil, r.name)
	expect(errors.Is(err, kerr.TopicAlreadyExists), "created twice: %v", err)
	updated, err := admin.UpdatePartitions(r.ctx, 4, r.name)
	must(err, "update partitions")
	must(updated[r.name].Err, "update partitions")
	details, err := admin.ListTopics(r.ctx, r.name)
	must(err, "list topics")
	expect(len(details[r.name].Partitions) == 4, "%d partitions", len(details[r.name].Partitions))
	more := "70000"
	altered, err := admin.AlterTopicConfigs(r.ctx, []kadm.AlterConfig{{Name: "retention.ms", Value: &more}}, r.name)
	must(err, "alter configs")
	must(altered[0].Err, "alter configs")
	configs, err := admin.DescribeTopicConfigs(r.ctx, r.name)
	must(err, "describe configs")
	for _, config := range configs[0].Configs {
		expect(config.Key != "retention.ms" || config.MaybeValue() == more, "retention.ms is %s", config.MaybeValue())
	}
	r.produce(r.client(), numbered(r.name, 100)...)
	ends, err := admin.ListEndOffsets(r.ctx, r.name)
	must(err, "end offsets")
	_, err = admin.DeleteRecords(r.ctx, ends.Offsets())
	must(err, "delete records")
	starts, err := admin.ListStartOffsets(r.ctx, r.name)
	must(err, "start offsets")
	var kept int64
	starts.Each(func(start kadm.ListedOffset) { kept += start.Offset })
	expect(kept == 100, "the partitions start at %d in all", kept)
	_, err = admin.DescribeAllLogDirs(r.ctx, nil)
	must(err, "log dirs")
	metadata, err := admin.BrokerMetadata(r.ctx)
	must(err, "metadata")
	expect(len(metadata.Brokers) == 1, "%d brokers", len(metadata.Brokers))
	_, err = admin.ElectLeaders(r.ctx, kadm.ElectPreferredReplica, nil)
	must(err, "elect leaders")
	_, err = admin.ListPartitionReassignments(r.ctx, nil)
	must(err, "reassignments")
	deleted, err := admin.DeleteTopics(r.ctx, r.name)
	must(err, "delete topic")
	must(deleted[r.name].Err, "delete topic")
}

func reset(r *run) {
	admin := r.create(1, nil)
	r.produce(r.client(), numbered(r.name, 10)...)
	options := []kgo.Opt{kgo.ConsumerGroup(r.name), kgo.ConsumeTopics(r.name)}
	client := r.client(options...)
	r.read(client, 10)
	must(client.CommitUncommittedOffsets(r.ctx), "commit")
	client.Close()
	offsets := kadm.Offsets{}
	offsets.AddOffset(r.name, 0, 4, -1)
	must(admin.CommitAllOffsets(r.ctx, r.name, offsets), "reset")
	client = r.client(options...)
	expect(string(r.read(client, 6)[0].Value) == "value-4", "reading did not go on at 4")
	lags, err := admin.Lag(r.ctx, r.name)
	must(err, "lag")
	expect(lags[r.name].Lag.Total() == 6, "the lag is %d", lags[r.name].Lag.Total())
	client.Close()
	_, err = admin.DeleteGroups(r.ctx, r.name)
	must(err, "delete group")
	groups, err := admin.ListGroups(r.ctx)
	must(err, "list groups")
	expect(!strings.Contains(strings.Join(groups.Groups(), " "), r.name), "the group is still there")
}

// policy: where a group begins that has no offset, or one that is gone, or one that holds.
func policy(r *run) {
	const count, start = 30, 12
	admin := r.create(1, nil)
	r.produce(r.client(), numbered(r.name, count)...)
	_, err := admin.DeleteRecords(r.ctx, r.at(start))
	must(err, "delete records")
	resets := map[string]kgo.Offset{"start": kgo.NewOffset().AtStart(), "end": kgo.NewOffset().AtEnd()}
	for name, reset := range resets {
		for _, committed := range []int64{-1, 3, 20} {
			group := fmt.Sprintf("%s-%s-%d", r.name, name, committed)
			if committed >= 0 {
				must(admin.CommitAllOffsets(r.ctx, group, r.at(committed)), "commit")
			}
			client := r.client(kgo.ConsumerGroup(group), kgo.ConsumeTopics(r.name), kgo.ConsumeResetOffset(reset))
			first := r.first(client)
			client.Close()
			switch {
			case committed == 20:
				expect(first == 20, "%s: it went on at %d, not at 20", group, first)
			case name == "start":
				expect(first == start, "%s: it began at %d", group, first)
			default:
				expect(first >= count, "%s: it began at %d", group, first)
			}
		}
	}
}

func (r *run) at(offset int64) kadm.Offsets {
	offsets := kadm.Offsets{}
	offsets.AddOffset(r.name, 0, offset, -1)
	return offsets
}

// first is the offset of the first record that a client gets. Whoever begins at the end needs new ones.
func (r *run) first(client *kgo.Client) int64 {
	for {
		soon, cancel := context.WithTimeout(r.ctx, 500*time.Millisecond)
		found := client.PollFetches(soon).Records()
		cancel()
		if len(found) > 0 {
			return found[0].Offset
		}
		must(r.ctx.Err(), "first record")
		r.produce(r.client(), numbered(r.name, 1)...)
	}
}

func manyPartitions(r *run) {
	r.create(many, nil)
	client := r.client(kgo.ConsumeTopics(r.name), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	var sent []*kgo.Record
	for i := range many {
		sent = append(sent, &kgo.Record{Topic: r.name, Partition: int32(i), Value: fmt.Append(nil, i)})
	}
	r.produce(client, sent...)
	for _, record := range r.read(client, many) {
		expect(string(record.Value) == fmt.Sprint(record.Partition), "%s is in %d", record.Value, record.Partition)
	}
}

func quotas(r *run) {
	admin := kadm.NewClient(r.client())
	name := r.name
	entity := kadm.ClientQuotaEntity{{Type: "client-id", Name: &name}}
	_, err := admin.AlterClientQuotas(r.ctx, []kadm.AlterClientQuotaEntry{
		{Entity: entity, Ops: []kadm.AlterClientQuotaOp{{Key: "consumer_byte_rate", Value: 1e6}}},
	})
	must(err, "alter quotas")
	described, err := admin.DescribeClientQuotas(r.ctx, true, []kadm.DescribeClientQuotaComponent{
		{Type: "client-id", MatchName: &name, MatchType: kmsg.QuotasMatchTypeExact},
	})
	must(err, "describe quotas")
	expect(len(described) == 1 && described[0].Values[0].Value == 1e6, "quotas: %v", described)
}
